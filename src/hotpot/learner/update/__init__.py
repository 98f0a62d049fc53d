"""One update: the plan of its optimiser steps, the steps, and what is reported of them."""
