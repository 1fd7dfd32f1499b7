"""Two Ray nodes on loopback: ``python two_nodes.py DASHBOARD_PORT TEMPORARY_FOLDER``.

Says when they are there. A line on standard input kills the second node, the end of it both.
"""

import sys


def main(port: int, folder: str) -> None:
    from ray.cluster_utils import Cluster  # here: doctests import every file of this folder

    here = {"node_ip_address": "127.0.0.1", "temp_dir": folder, "num_cpus": 1}
    dashboard = {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": port}
    cluster = Cluster(initialize_head=True, head_node_args={**here, **dashboard})
    second = cluster.add_node(**here)
    print("two nodes", flush=True)
    for _ in sys.stdin:
        cluster.remove_node(second, allow_graceful=False)
        print("one node", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
