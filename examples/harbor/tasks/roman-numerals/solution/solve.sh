#!/bin/bash
set -e
cp /solution/roman.py /app/roman.py
