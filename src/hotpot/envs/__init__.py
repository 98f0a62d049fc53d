"""Environments: the interface, how they are found and versioned, their tools, and the check of their contract.

``base`` what an environment is · ``registry`` finding and binding one · ``tools`` typed functions as tools ·
``demonstrate`` running a demonstrator · ``check`` the contract · ``order_desk`` a customer-service agent over SQLite
"""

from hotpot.envs.base import BoundEnvironment, Demonstrator, Environment, EnvironmentSpec
from hotpot.envs.check import Finding, Level, check_environment
from hotpot.envs.demonstrate import Demonstration, Exchange, demonstrate, replay
from hotpot.envs.registry import EnvironmentEntry, bind, list_environments, load_environment
from hotpot.envs.tools import Tool, Toolbox, ToolReply, clip, define_tool, error_reply

__all__ = [
    "BoundEnvironment",
    "Demonstration",
    "Demonstrator",
    "Environment",
    "EnvironmentEntry",
    "EnvironmentSpec",
    "Exchange",
    "Finding",
    "Level",
    "Tool",
    "ToolReply",
    "Toolbox",
    "bind",
    "check_environment",
    "clip",
    "define_tool",
    "demonstrate",
    "error_reply",
    "list_environments",
    "load_environment",
    "replay",
]
