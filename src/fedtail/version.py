"""The version, declared once: the package, what is installed and the messages of federations have it from here."""

VERSION = "0.6.0"
