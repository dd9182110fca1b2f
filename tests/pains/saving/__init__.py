"""Problems with checkpoints, resumes and disks."""
