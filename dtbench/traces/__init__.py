"""Jobs of a user: records traces of torch.profiler, reads them and analyzes where the time of a step goes."""
