"""Table rows that several frameworks share, and helpers of rows."""
