package main

import (
	"encoding/json"
	"os"

	"github.com/spf13/cobra"
)

func benchCommand() *cobra.Command {
	c := &cobra.Command{Use: "bench", Short: "Measure all-reduce, codecs or the search for barriers, and check the results", Args: cobra.NoArgs}
	c.AddCommand(benchAllreduceCommand(), benchCodecCommand(), benchBarrierCommand())
	return c
}

func writeJSON(file string, v any) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(data, '\n'), 0o666)
}
