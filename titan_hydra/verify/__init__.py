"""The matrix of layouts, its proof, and the fake world that builds any rank of any layout."""
