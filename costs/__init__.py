"""What a model costs to serve, from its configuration: formulas, their tables, traffic, a simulated node."""
