"""NVFlare: the transport over a controller's tasks."""
