"""The acceptance matrix of layouts, its verification, and the fake world that builds any rank of any layout."""
