"""The one definition of Inkling, written against `engine.py` and the resolved ops."""
