"""Real federations: a deployment folder, what runs at server and sites, and the checks around them."""
