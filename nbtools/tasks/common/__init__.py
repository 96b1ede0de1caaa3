"""What the tasks share: source files, labels, text metrics, CTC, and demo data."""
