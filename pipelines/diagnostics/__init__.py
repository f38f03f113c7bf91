"""Reports about models, programs and machines."""
