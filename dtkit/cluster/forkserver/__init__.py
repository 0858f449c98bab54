"""A process of this host that has loaded torch and forks engines, which therefore start at once."""
