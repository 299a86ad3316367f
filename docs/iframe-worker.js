// Browsers start no worker from file:// pages. For the search of the offline site a hidden frame plays one.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!doctype html>";
      frame.addEventListener("load", () => {
        const inside = frame.contentWindow;
        const answer = (data) => {
          const event = new MessageEvent("message", { data });
          this.onmessage?.(event);
          this.dispatchEvent(event);
        };
        inside.postMessage = answer;
        inside.importScripts = (...urls) => urls.reduce((before, each) => before.then(() => this.load(inside, each)), Promise.resolve());
        this.load(inside, url).then(() => {
          this.send = (data) => inside.dispatchEvent(new MessageEvent("message", { data }));
          this.waiting.splice(0).forEach(this.send);
        });
      }, { once: true });
      document.body.append(frame);
      this.terminate = () => frame.remove();
    }
    load(inside, url) {
      return new Promise((done, failed) => {
        const script = inside.document.createElement("script");
        script.src = new URL(url, location.href);
        script.onload = done;
        script.onerror = failed;
        inside.document.head.append(script);
      });
    }
    postMessage(data) {
      if (this.send) this.send(data); else this.waiting.push(data);
    }
  };
}
