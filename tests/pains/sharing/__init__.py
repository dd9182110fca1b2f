"""Problems with what ranks share: ports, output, data, trackers."""
