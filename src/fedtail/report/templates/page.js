(() => {
  "use strict";
  const root = document.documentElement, tip = document.getElementById("tip");
  const store = { get() { try { return localStorage.getItem("fedtail-theme"); } catch { return null; } },
                  set(v) { try { localStorage.setItem("fedtail-theme", v); } catch { /* private mode: not kept */ } } };
  const saved = store.get();
  if (saved === "light" || saved === "dark") root.dataset.theme = saved;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    store.set(root.dataset.theme);
  });

  const show = (parts, x, y) => {
    tip.replaceChildren(...parts);
    tip.hidden = false;
    const w = tip.offsetWidth, h = tip.offsetHeight;
    tip.style.left = Math.max(6, Math.min(innerWidth - w - 6, x + 14 + w > innerWidth ? x - w - 14 : x + 14)) + "px";
    tip.style.top = Math.max(6, Math.min(innerHeight - h - 6, y - h / 2)) + "px";
  };
  const hide = () => { tip.hidden = true; };
  const row = (text, colour) => {
    const div = document.createElement("div");
    if (colour !== undefined) {
      const s = document.createElement("span");
      s.className = "swatch c" + colour;
      div.append(s);
    }
    div.append(text);
    return div;
  };
  const heading = (text) => { const b = document.createElement("b"); b.textContent = text; return b; };
  const hidden = (mark) => mark.closest(".off, .filtered") !== null;
  const num = (v) => v === null || v === undefined ? "–" : Number.isInteger(v) ? String(v) : Math.abs(v) >= 1e-3 ? v.toFixed(3) : v.toPrecision(3);
  const point = (svg, event) => new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  const place = (svg, x, y) => new DOMPoint(x, y).matrixTransform(svg.getScreenCTM());
  const wire = (svg, { move, key, leave }) => {
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointerleave", () => { leave(); hide(); });
    svg.addEventListener("blur", () => { leave(); hide(); });
    svg.addEventListener("keydown", (e) => {
      if (e.key === "Escape") { leave(); hide(); return; }
      const step = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[e.key];
      if (step || e.key === "Home" || e.key === "End") { if (key(step, e.key) !== false) e.preventDefault(); }
    });
  };

  const places = (d) => [...new Set(d.series.flatMap((s) => s.x))].sort((a, b) => a - b);
  const lines = (figure, svg, d) => {
    const cursor = svg.querySelector(".cursor"), xs = places(d);
    const [lo, hi, from, to] = d.x;
    const at = (v) => hi > lo ? from + (v - lo) / (hi - lo) * (to - from) : (from + to) / 2;
    let now = -1;
    const read = (s, v) => {
      const i = s.x.indexOf(v);
      if (i >= 0) return { y: s.y[i], s: s.s[i] };
      const up = d.between ? s.x.findIndex((x, k) => k && (s.x[k - 1] - v) * (x - v) < 0) : -1;
      if (up < 1 || s.y[up] === null || s.y[up - 1] === null) return null;
      return { y: s.y[up - 1] + (v - s.x[up - 1]) / (s.x[up] - s.x[up - 1]) * (s.y[up] - s.y[up - 1]) };
    };
    const pick = (i) => {
      now = Math.max(0, Math.min(xs.length - 1, i));
      const v = xs[now], x = at(v);
      cursor.setAttribute("x1", x);
      cursor.setAttribute("x2", x);
      const rows = d.series.map((s, j) => ({ s, j, found: read(s, v) }))
        .filter(({ j, found }) => found && !hidden(figure.querySelector(`.series[data-series="${j}"]`)))
        .sort((a, b) => (b.found.y ?? -1e9) - (a.found.y ?? -1e9))
        .map(({ s, found }) => row(`${s.name}: ${num(found.y)}${found.s ? " ± " + num(found.s) : ""}`, s.c));
      const p = place(svg, x, (d.y[2] + d.y[3]) / 2);
      show([heading(`${d.label} ${d.names[now] ?? v}`), ...rows], p.x, p.y);
    };
    wire(svg, {
      move: (e) => {
        const p = point(svg, e), v = lo + (p.x - from) / (to - from) * (hi - lo);
        let best = 0;
        xs.forEach((x, i) => { if (Math.abs(x - v) < Math.abs(xs[best] - v)) best = i; });
        pick(best);
      },
      key: (step, name) => step ? step[0] ? pick(now + step[0]) : false : pick(name === "Home" ? 0 : xs.length - 1),
      leave: () => { cursor.setAttribute("x1", -9); cursor.setAttribute("x2", -9); },
    });
  };

  const marks = (figure, svg) => {
    const all = () => [...svg.querySelectorAll("[data-tip]")].filter((m) => !hidden(m));
    let hot = null;
    const leave = () => { hot?.classList.remove("hot"); hot = null; };
    const pick = (mark) => {
      leave();
      hot = mark;
      hot.classList.add("hot");
      const [first, ...rest] = hot.dataset.tip.split("\n"), box = hot.getBoundingClientRect();
      show([heading(first), ...rest.map((t) => row(t))], box.left + box.width / 2, box.top);
    };
    wire(svg, {
      move: (e) => { const m = e.target.closest?.("[data-tip]"); if (m) pick(m); else { leave(); hide(); } },
      key: (step, name) => {
        const list = all(), i = list.indexOf(hot);
        if (list.length) pick(list[name === "Home" ? 0 : name === "End" ? list.length - 1 : Math.max(0, Math.min(list.length - 1, i + step[0] + step[1]))]);
      },
      leave,
    });
  };

  // The numbers behind a chart, as a table that is made when it is opened: [head, ...rows].
  const numbers = {
    lines: (figure, d) => [[d.label, ...d.series.map((s) => s.name)], ...places(d).map((v, i) => [d.names[i] ?? v, ...d.series.map((s) => {
      const at = s.x.indexOf(v);
      return at < 0 ? "–" : num(s.y[at]) + (s.s[at] ? " ± " + num(s.s[at]) : "");
    })])],
    marks: (figure, d) => {
      const said = new Map(d.rows.map((name) => [name, new Map()])), columns = new Set();
      figure.querySelectorAll("[data-tip]").forEach((mark) => {
        const [name, text] = mark.dataset.tip.split("\n"), cut = text.lastIndexOf(": ");
        columns.add(text.slice(0, cut));
        said.get(name).set(text.slice(0, cut), text.slice(cut + 2));
      });
      const side = d.sides.length ? [d.side] : [];
      return [[d.label, ...columns, ...side], ...d.rows.map((name, i) => [name, ...[...columns].map((c) => said.get(name).get(c) ?? "–"), ...d.sides.slice(i, i + 1)])];
    },
  };
  const tabled = ([head, ...rows]) => {
    const table = document.createElement("table"), top = table.createTHead().insertRow(), body = table.createTBody();
    const named = (line, text, scope) => {
      const th = document.createElement("th");
      th.scope = scope;
      th.textContent = text;
      line.append(th);
    };
    head.forEach((text) => named(top, text, "col"));
    rows.forEach(([name, ...cells]) => {
      const line = body.insertRow();
      named(line, name, "row");
      cells.forEach((text) => { line.insertCell().textContent = text; });
    });
    if (rows.length > 1) sortable(table);
    return table;
  };

  document.querySelectorAll("figure.chart").forEach((figure) => {
    const svg = figure.querySelector(".canvas svg"), kind = figure.dataset.kind;
    const d = JSON.parse(figure.querySelector('script[type="application/json"]').textContent), details = figure.querySelector("details");
    ({ lines, marks })[kind](figure, svg, d);
    details.addEventListener("toggle", () => details.querySelector(".scroll").replaceChildren(tabled(numbers[kind](figure, d))));
    figure.querySelectorAll(".legend button").forEach((button) => button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", on);
      figure.querySelectorAll(`.series[data-series="${button.dataset.series}"]`).forEach((g) => g.classList.toggle("off", !on));
    }));
  });

  // A cell of a map is read where it is pointed at.
  document.querySelectorAll("table.heat").forEach((table) => {
    const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
    table.addEventListener("pointerover", (e) => {
      const cell = e.target.closest("td:not(.plain)"), box = cell?.getBoundingClientRect();
      if (cell) show([heading(cell.textContent), row(cell.parentNode.cells[0].textContent), row(names[cell.cellIndex])], box.right, box.top);
      else hide();
    });
    table.addEventListener("pointerleave", hide);
  });

  // Which methods are shown: rows, series and figures that belong to a contender carry its number.
  document.querySelectorAll(".comparison").forEach((part) => {
    const bar = part.querySelector(".filter");
    if (!bar) return;
    const buttons = [...bar.querySelectorAll("button[data-run]")], field = bar.querySelector("input");
    const marked = [...part.querySelectorAll("[data-run]")].filter((e) => !bar.contains(e));
    const update = () => {
      const off = new Set(buttons.filter((b) => b.getAttribute("aria-pressed") !== "true").map((b) => b.dataset.run));
      marked.forEach((e) => e.classList.toggle("filtered", off.has(e.dataset.run)));
      bar.querySelector(".count").textContent = off.size ? `${buttons.length - off.size} of ${buttons.length} shown` : "";
      bar.querySelector(".every").hidden = !off.size;
      hints();
    };
    const press = (which) => { buttons.forEach((b) => b.setAttribute("aria-pressed", which(b))); update(); };
    buttons.forEach((b) => b.addEventListener("click", () => {
      b.setAttribute("aria-pressed", b.getAttribute("aria-pressed") !== "true");
      update();
    }));
    bar.querySelector(".every").addEventListener("click", () => { if (field) field.value = ""; press(() => true); });
    field?.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      press((b) => words.every((w) => b.textContent.toLowerCase().includes(w)));
    });
    bar.querySelector(".every").hidden = true;
  });

  // Tables sort by a click on a head: once the better end first, again the other way, a third time as they were.
  const number = /^[+\u2212-]?(\d[\d,]*)?(\.\d+)?(e[+-]?\d+)?/i;
  const value = (cell) => {
    if (cell.dataset.v !== undefined) return Number(cell.dataset.v);
    const text = (cell.firstChild?.nodeType === 3 ? cell.firstChild.data : cell.textContent).trim();
    if (text === "" || text === "–") return null;
    const found = text.replace(/^[<>]\s*/, "").match(number)[0].replace("\u2212", "-").replaceAll(",", "");
    return found !== "" && found !== "-" && found !== "+" ? Number(found) : text.toLowerCase();
  };
  const sortable = (table) => {
    const body = table.tBodies[0], original = [...body.rows], heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      if (!head.textContent.trim()) return;
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...head.childNodes);
      head.append(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const keys = new Map(original.map((r) => [r, value(r.cells[column])]));
        const texts = [...keys.values()].some((v) => typeof v === "string");
        const order = texts ? ["ascending", "descending", "none"] : ["descending", "ascending", "none"];
        const next = order[(order.indexOf(head.getAttribute("aria-sort")) + 1) % 3];
        heads.forEach((h) => { if (h.hasAttribute("aria-sort")) h.setAttribute("aria-sort", "none"); });
        head.setAttribute("aria-sort", next);
        const sign = next === "ascending" ? 1 : -1;
        const compare = (a, b) => {
          const [x, y] = [keys.get(a), keys.get(b)];
          if (x === null || y === null) return (x === null) - (y === null);
          return sign * (texts ? String(x).localeCompare(String(y), undefined, { numeric: true }) : x - y);
        };
        body.append(...(next === "none" ? original : [...original].sort(compare)));
      });
    });
  };
  document.querySelectorAll("table.sortable").forEach(sortable);

  // What is wider than its frame says so, until it was scrolled.
  const frames = [...document.querySelectorAll(".scroll, .canvas, nav")];
  const hint = (frame) => {
    const more = frame.scrollWidth - frame.clientWidth > 4;
    frame.dataset.more = !more ? "" : frame.scrollLeft + frame.clientWidth < frame.scrollWidth - 4 ? "right" : "left";
  };
  const hints = () => frames.forEach(hint);
  frames.forEach((frame) => frame.addEventListener("scroll", () => hint(frame), { passive: true }));
  addEventListener("resize", hints);
  document.querySelectorAll("details").forEach((d) => d.addEventListener("toggle", () => d.querySelectorAll(".scroll, .canvas").forEach(hint)));
  hints();

  // The section in sight is marked in the list of sections.
  const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
  const seen = new IntersectionObserver((entries) => entries.filter((e) => e.isIntersecting).forEach((e) => {
    links.forEach((a) => a.removeAttribute("aria-current"));
    const link = links.get(e.target.id), nav = link?.parentElement;
    if (!link) return;
    link.setAttribute("aria-current", "true");
    nav.scrollTo({ left: link.offsetLeft - nav.clientWidth / 2 + link.offsetWidth / 2 });
  }), { rootMargin: "-20% 0px -70% 0px" });
  document.querySelectorAll("section, h1.problem").forEach((s) => seen.observe(s));

  // A page that is served while its run goes on looks for a new state, and loads anew with its folds as they were.
  const live = document.body.dataset.live, folds = () => [...document.querySelectorAll("details.fold")];
  if (live !== undefined) {
    const key = "fedtail-folds";
    try { JSON.parse(sessionStorage.getItem(key) ?? "[]").forEach((i) => { const d = folds()[i]; if (d) d.open = true; }); } catch { /* as new */ }
    const look = async () => {
      try {
        const state = await (await fetch("/state", { cache: "no-store" })).text();
        if (state !== live) {
          sessionStorage.setItem(key, JSON.stringify(folds().flatMap((d, i) => d.open ? [i] : [])));
          location.reload();
          return;
        }
      } catch {  // the run is over, and with it who served the page
        document.querySelector("[role=status]").textContent = "The run is over: report.html in its folder has how it ended.";
        return;
      }
      setTimeout(look, 1500);
    };
    setTimeout(look, 1500);
  }

  // A printed page has everything: folds open, and close again.
  const folded = new Set();
  addEventListener("beforeprint", () => document.querySelectorAll("details.fold:not([open])").forEach((d) => { folded.add(d); d.open = true; }));
  addEventListener("afterprint", () => { folded.forEach((d) => { d.open = false; }); folded.clear(); });
})();
