"""The maths of the methods, on arrays and tensors: no files, no clients, no settings."""
