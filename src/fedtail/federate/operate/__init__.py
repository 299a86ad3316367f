"""What an operator does: create a deployment, start it, look after it."""
