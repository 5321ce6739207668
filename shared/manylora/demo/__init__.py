"""The demo: a small trained model, four tenants' adapters, and the run that proves who answered."""
