"""What all tests share: one thread a process, since many ranks run on few cores, and no network."""
import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
