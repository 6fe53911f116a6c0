"""From one placement to another: the route by cost, the steps along it, its gradient."""
