"""The texts ``fedtail deploy init`` writes: site configuration, systemd units, proxy configuration, instructions."""

from __future__ import annotations

SITE_TOML = """# What this site contributes and what it allows. The server never sees this file.

[site]
name = "{name}"
server = "{server}"

[data]
{data}

[policy]
# methods = ["fedcgnm", "fedavg"]   # allowed methods; default: all
# code = ["my_net:Net"]             # custom models that a server may ask this site to import; default: none
# encoders = ["efficientnet_lite0"] # image encoders; default: those of installed packages
reveal = "sums"                     # the most validation may send: "totals", "sums" (class counts; the server sees only
                                    # their sums over sites), or "classes" (this site's own class counts)
min_sites = 3                       # minimum number of sites that a sum, or a difference of sums, may cover
differences = "refuse"              # or "allow": take part in a sum even if a site from earlier sums is missing
# updates = "masked"                # refuse runs in which the server would see this site's individual updates
min_class_count = 0                 # refuse to train while a class here has fewer samples
max_rounds_per_day = 1000           # training messages answered in 24 hours, over all runs; 0: no limit
min_noise = 0.0                     # refuse runs with less local noise than this
max_epsilon = 0.0                   # refuse to train once noisy updates have cost more, over all runs; 0: no limit
max_update_mb = 0.0                 # refuse runs with larger updates; 0: no limit
# More limits, with safe defaults: see "policy" in the settings documentation

[worker]
device = "cpu"                      # or "cuda"
threads = 1
memory_mb = 4096                    # restarted after a message if larger; never more than twice this
idle_minutes = 60
"""

SLICE_DATA = """# A rehearsal: this site acts as client {client} of the data set named in config.toml.
kind = "slice"
config = "{config}"
client = {client}"""

TABLE_DATA = """# A table with one row per sample ...
kind = "table"
path = "data.csv"                   # CSV, TSV or Parquet, relative to this file
schema = "schema.toml"              # columns, levels and classes all sites agreed on (`fedtail data schema`)
validation = 0.1                    # private validation split
test = 0.2                          # private test split
# ... or a folder with one folder of images per class:
# kind = "images"
# path = "images"
# classes = ["good", "scratch", "crack"]
# size = [64, 64]
# channels = 1
"""

SUPERLINK_UNIT = """# Copy to /etc/systemd/system/, then: systemctl enable --now fedtail-superlink
[Unit]
Description=fedtail server ({name})
After=network-online.target
Wants=network-online.target

[Service]
User=fedtail
WorkingDirectory={server}
ExecStart={command}
Restart=on-failure
RestartSec=5
# Everything that Flower and fedtail start stops with the unit.
KillMode=control-group
NoNewPrivileges=true
ProtectSystem=strict
PrivateTmp=true
ProtectHome=read-only
ReadWritePaths={writable}

[Install]
WantedBy=multi-user.target
"""

SUPERNODE_UNIT = """# Copy to /etc/systemd/system/, then: systemctl enable --now fedtail-site
# Paths assume that this folder was copied to {home} and fedtail is installed in {venv}.
[Unit]
Description=fedtail site {name}
After=network-online.target
Wants=network-online.target

[Service]
User=fedtail
WorkingDirectory={home}
ExecStart={command}
Restart=always
RestartSec=15
KillMode=control-group
MemoryMax=12G
NoNewPrivileges=true
ProtectSystem=strict
PrivateTmp=true
ReadWritePaths={writable}

[Install]
WantedBy=multi-user.target
"""

NGINX = """# Flower's control API has no authentication and shares a port with the fleet API: anyone who reaches it
# can register a site or start a run. The SuperLink therefore listens only on {host}:{port}, and this proxy
# forwards the fleet path and nothing else. Include it in nginx's http block, or run:
# nginx -c {server}/nginx.conf -p {server}
worker_processes 1;
pid "{server}/nginx.pid";
error_log "{server}/nginx.log" warn;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path "{server}/nginx-body";
    proxy_temp_path "{server}/nginx-proxy";
    fastcgi_temp_path "{server}/nginx-unused";
    uwsgi_temp_path "{server}/nginx-unused";
    scgi_temp_path "{server}/nginx-unused";
    limit_conn_zone $binary_remote_addr zone=sites:1m;
    server {{
        listen {listen} ssl;
        ssl_certificate "{server}/server.crt";
        ssl_certificate_key "{server}/server.key";
        ssl_protocols TLSv1.2 TLSv1.3;
        client_max_body_size 64m;          # Flower sends large arrays in chunks
        limit_conn sites 64;
        location /v1/fleet/ {{
            limit_except POST {{ deny all; }}
            proxy_pass https://{host}:{port};
            proxy_ssl_trusted_certificate "{server}/ca.crt";
            proxy_ssl_verify on;
            proxy_ssl_name localhost;          # nginx checks names, not addresses
            proxy_http_version 1.1;
            proxy_request_buffering off;
            proxy_buffering off;
            proxy_read_timeout 300s;
        }}
        location / {{ return 403; }}
    }}
}}
"""

SITE_README = """# Site {name}

This folder is all you need to take part in the federation "{deployment}". Keep `site.key` secret: it identifies you
to the server. Your data stays where it is; what leaves this machine is listed below.

1. Install: `python3.11 -m venv /opt/fedtail/venv && /opt/fedtail/venv/bin/pip install "fedtail[flower]=={version}"`
2. Copy this folder to `/opt/fedtail/{name}` and make it readable by the service user only (`chmod 700`).
3. Edit `site.toml`: where your data is, and what you allow (`[policy]`).
4. Check: `fedtail deploy doctor --site site.toml` checks your data and certificates and reports what is wrong.
5. Start: copy `fedtail-site.service` to `/etc/systemd/system/` and `systemctl enable --now fedtail-site`.
   Manually: `{command}`
6. Monitor: `{health}` shows whether the server answers; use its exit code in your monitoring.

You do not open any port: the site connects to `{public}` over TLS and asks for work. The service reconnects by itself
after an outage, a new certificate or a server restart. `site.log` records the connection, `worker.log` what the worker
does, and `audit.jsonl` every request, with its run, round and outcome.

What leaves this machine: model updates, with their number of steps and mean training loss; the number of your training
and validation samples; how many validation and test samples a model classifies correctly; anything else a method
(`fedtail methods` lists it) or a rate search asks for. Before the first round: column names and class names, and sums
over the columns of a table or the pixels of images; with a pretrained encoder, its hash instead of pixel sums. With
`policy.reveal = "sums"`, also per-class counts, under masks that cancel only in the sum over at least `min_sites`
sites: `sites.pub` lists the keys used for them, so compare it with the other sites by phone. With
`policy.reveal = "classes"`, plain per-class counts. Nothing else.

To leave, stop the service. A run continues without you, and takes you back when you return.
"""

SERVER_README = """# Deployment {name}

    deployment.toml   names and addresses
    config.toml       what is trained: method, rates, model, rounds
    server/           CA, TLS key, Flower's database, proxy configuration, systemd unit
    sites/<name>/     what each site gets; send each folder to its operator over a trusted channel
    runs/             results

`server/ca.key` signs server certificates and `sites/*/site.key` are the sites' identities. Once the folders are
delivered, delete your copies of `site.key`; the server needs only `site.pub`.

1. Copy `server/fedtail-superlink.service` to `/etc/systemd/system/` and start it.
2. Put the proxy in front: `nginx -c {server}/nginx.conf -p {server}`. It listens on {listen} and forwards only the
   fleet path. Never expose port {port}: Flower's control API behind it has no authentication.
3. Register the sites (once): `fedtail deploy register {folder}`.
4. When sites are online (`fedtail deploy status {folder}`): `fedtail deploy doctor {folder}`, then
   `fedtail deploy run {folder}`. After a crash, `fedtail deploy run {folder} --resume` continues from the checkpoint.

Rehearse on one machine first: `fedtail deploy up {folder}`, `fedtail deploy run {folder}`,
`fedtail deploy down {folder}`.
"""
