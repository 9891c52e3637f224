"""What frameworks around PyTorch have in common: pickles as data, archives of `torch.save`, states, what they mean."""
