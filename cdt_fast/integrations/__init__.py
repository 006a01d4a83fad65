"""Descent constraints inside the trainers that people already use: transformers', TRL's and Lightning's."""
