"""``fedtail deploy init --docker``: an image with fedtail, and compose files for the server and for each site."""

from __future__ import annotations

import json
from importlib.metadata import version

from fedtail.federate.deployment import Deployment
from fedtail.federate.operate.commands import serve_command
from fedtail.version import VERSION

IMAGE = "fedtail"
NGINX_IMAGE = "nginx:1.27-alpine"
DOCKERFILE = """# fedtail for server and sites. Build in this folder: docker build -t {image}:{version} .
FROM python:3.11-slim
# torch for CPUs; for a GPU, drop the index URL
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch=={torch} \\
    && pip install --no-cache-dir "fedtail[flower]=={version}" \\
    && useradd --create-home --uid 1000 fedtail
ENV OMP_NUM_THREADS=1
USER 1000
ENTRYPOINT ["fedtail"]
"""
SERVER_COMPOSE = """# Start with: docker compose up -d
# The folder has the same path inside the container, so commands work unchanged, e.g.
#   docker compose exec superlink fedtail deploy status {folder}
# FEDTAIL_UID and FEDTAIL_GID: owner of the folder.
services:
  superlink:
    image: {image}
    build: .
    user: "${{FEDTAIL_UID:-1000}}:${{FEDTAIL_GID:-1000}}"
    working_dir: {server}
    command: {command}
    volumes: [{volume}]
    # The proxy's port, and no other: Flower's control API has no authentication.
    ports: ["{listen}:{listen}"]
    restart: unless-stopped
    init: true
  proxy:
    image: {nginx}
    user: "${{FEDTAIL_UID:-1000}}:${{FEDTAIL_GID:-1000}}"
    # It shares the SuperLink's loopback, on which the SuperLink listens.
    network_mode: "service:superlink"
    entrypoint: {proxy}
    volumes: [{volume}]
    depends_on: [superlink]
    restart: unless-stopped
"""
SITE_COMPOSE = """# Start with: docker compose up -d. For data outside this folder, add a line under volumes.
services:
  site:
    image: {image}
    build: .
    user: "${{FEDTAIL_UID:-1000}}:${{FEDTAIL_GID:-1000}}"
    command: ["site", "run", "/site"]
    volumes: [".:/site"]
    healthcheck:
      test: ["CMD", "fedtail", "site", "health", "/site"]
      interval: 1m
      start_period: 1m
    restart: unless-stopped
    init: true
"""


def write_docker(deployment: Deployment) -> None:
    """Dockerfile and compose files, beside the units."""
    image = f"{IMAGE}:{VERSION}"
    dockerfile = DOCKERFILE.format(image=IMAGE, version=VERSION, torch=version("torch").partition("+")[0])
    server, volume = deployment.server, f"{deployment.folder}:{deployment.folder}"
    (deployment.folder / "Dockerfile").write_text(dockerfile)
    (deployment.folder / ".dockerignore").write_text("*\n")  # keys and data have no place in an image
    proxy = ["nginx", "-c", str(server / "nginx.conf"), "-p", str(server), "-g", "daemon off;"]
    (deployment.folder / "compose.yaml").write_text(
        SERVER_COMPOSE.format(
            folder=deployment.folder,
            image=image,
            server=json.dumps(_escaped(str(server))),
            command=json.dumps(_escaped_all(serve_command("", deployment)[1:])),
            volume=json.dumps(_escaped(volume)),
            listen=deployment.proxy_port,
            nginx=NGINX_IMAGE,
            proxy=json.dumps(_escaped_all(proxy)),
        )
    )
    for name in deployment.sites:
        folder = deployment.site(name)
        (folder / "Dockerfile").write_text(dockerfile)
        (folder / ".dockerignore").write_text("*\n")
        (folder / "compose.yaml").write_text(SITE_COMPOSE.format(image=image))


def _escaped(word: str) -> str:
    """Compose takes ``$`` for a variable."""
    return word.replace("$", "$$")


def _escaped_all(words: list[str]) -> list[str]:
    return [_escaped(word) for word in words]
