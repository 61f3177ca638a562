"""The init container `conch fetch`: models from their sources, verified, into one complete model repository."""
