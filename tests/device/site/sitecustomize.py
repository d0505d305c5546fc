"""With this folder and the project on PYTHONPATH, every Python process has the simulated device, also one that batchwright
starts."""

if __name__ == "sitecustomize":  # not if a test runner imports it
    from tests.device.sim.patches import install

    install()
