"""What the tasks share: source files, labels, text comparison, CTC, demo data, figures and confusion tables."""
