"""Problems with signals, terminals and launchers that end."""
