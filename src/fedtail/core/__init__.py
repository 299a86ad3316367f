"""Pure maths on arrays and tensors; nothing here knows of clients, files or devices."""
