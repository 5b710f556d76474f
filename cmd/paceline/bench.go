package main

import (
	"bytes"
	"encoding/json"
	"io"
	"os"

	"github.com/spf13/cobra"
)

func benchCommand() *cobra.Command {
	c := &cobra.Command{Use: "bench", Short: "Measure all-reduce, codecs or the search for barriers, and check the results", Args: cobra.NoArgs}
	c.AddCommand(benchAllreduceCommand(), benchCodecCommand(), benchBarrierCommand())
	return c
}

// printJSON writes v as JSON with indentation.
func printJSON(out io.Writer, v any) error {
	e := json.NewEncoder(out)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func writeJSON(file string, v any) error {
	var b bytes.Buffer
	if err := printJSON(&b, v); err != nil {
		return err
	}
	return os.WriteFile(file, b.Bytes(), 0o666)
}
