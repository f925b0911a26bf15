from titan_hydra.experiments.launch.main import launch

if __name__ == "__main__":
    launch(__file__)
