"""Training: pure steps for PPO, supervised and reward-model training, and the loop around them."""
