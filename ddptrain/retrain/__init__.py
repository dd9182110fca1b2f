"""`ddptrain retrain`: trains a model anew, and makes the result the champion if it is better."""
