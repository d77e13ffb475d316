"""One job, fine-tuning on photos with a kill in the middle, written for four trainers and by hand."""
