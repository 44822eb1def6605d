"""The planner's estimates next to published figures."""
