"""Replica groups that train apart, meet every few steps, and outlive each other: Local SGD and DiLoCo."""
