"""What tests share: doubles, small models and data, and helpers that wait, start and look."""
