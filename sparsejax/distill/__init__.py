"""Recovery after surgery: a student learns from the model it was made of."""
