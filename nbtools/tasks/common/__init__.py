"""What the tasks share: source files, their rules, labels, text metrics, CTC, and demo data."""
