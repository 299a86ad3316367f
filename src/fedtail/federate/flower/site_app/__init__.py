"""The part of fedtail that Flower starts at a site for every message. It must stay light: no torch, no fedtail.

This folder is copied into the app bundle as it is, so it imports nothing but the standard library and Flower.
"""
