from titan_hydra.extend import launch_script

if __name__ == "__main__":
    launch_script(__file__)
