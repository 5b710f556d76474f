package node_test

const processRole = "PACELINE_TEST_ROLE"

func processMain(string) int { return 0 }
