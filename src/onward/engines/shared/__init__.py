"""What tables have in common: rows that are the same in several frameworks, and what rows are made of."""
