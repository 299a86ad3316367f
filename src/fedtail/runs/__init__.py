"""One run: settings to problem to rounds to folder, and what is done with it afterwards."""
