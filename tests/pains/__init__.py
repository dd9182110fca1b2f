"""The best-known problems of launchers, each shown with a peer and with ddptrain: `make bench-pains`."""
