"""What ``mpi_scripts/check_cluster.py`` measures, finds and shows."""
