"""Pipeline schedules: tables of actions, their validation and simulation."""
