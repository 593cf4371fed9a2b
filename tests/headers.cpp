// Has the headers compiled that test programs share; see CMakeLists.txt.
int main() { return 0; }
