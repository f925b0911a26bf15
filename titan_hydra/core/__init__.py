"""The trainer, and what a job is. Read train/trainer.py and train/loop.py first. Imports no other wing."""
