"""Plug-ins for the trainers and formats of others; each module is imported by its own name."""
